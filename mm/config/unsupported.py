"""What other trainers do and this version does not, in the words of every message about it."""

from mm.families.known import TITLES

OTHER_MODELS = f"this version trains {TITLES}, neither Qwen2-VL nor Qwen3-VL"
AUDIO = "this version trains on images, videos and text, not on audio"
TOOLS = "samples with tool turns are refused"
PREFERENCES = "preference training is not supported by this version"
TWO_COLUMNS = ("a question and an answer in two columns, as in ms-swift's query and response, are read only if "
               "attr.prompt and attr.response in the data JSON name these columns")
