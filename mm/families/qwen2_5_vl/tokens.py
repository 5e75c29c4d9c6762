"""The control tokens of Qwen2.5-VL."""

from mm.families.family import ChatTokens

TOKENS = ChatTokens(
    image="<|image_pad|>",
    video="<|video_pad|>",
    vision_start="<|vision_start|>",
    vision_end="<|vision_end|>",
    turn_start="<|im_start|>",
    turn_end="<|im_end|>",
    box_start="<|box_start|>",
    box_end="<|box_end|>",
    others=("<|endoftext|>", "<|vision_pad|>"),
    image_id=151655,
    video_id=151656,
    vision_start_id=151652,
)
