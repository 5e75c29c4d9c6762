"""Answers a dataset file with ``transformers`` alone, to prove that an exported checkpoint works without the trainer.

Imports nothing from the trainer.  Writes the answers as JSON, and the logits of the first samples as safetensors
(``logits.N`` [num_tokens, vocabulary] and ``token_ids.N`` of sample N, question and answer together).

    python -m demo.evaluate --model DIR --dataset held_out.json --answers answers.json --logits logits.safetensors
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import av
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

MEDIA_TAG = re.compile("<(image|video)>")
MEDIA_TOKEN = re.compile(r"<\|(image|video)_pad\|>")
BATCH_SIZE = 60


@dataclass(frozen=True)
class Reader:
    """A loaded checkpoint, with the processors for pictures and videos."""

    model: Qwen2_5_VLForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil

    @classmethod
    def load(cls, directory: Path) -> "Reader":
        model, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            directory, dtype=torch.float32, output_loading_info=True  # transformers' types lack the report
        )
        leftovers = {name: keys for name, keys in report.items() if keys}
        if leftovers:
            raise ValueError(f"{directory} does not have exactly the weights of the model: {leftovers}")
        # Pillow's: the other needs torchvision, and so does AutoImageProcessor in older releases of transformers.
        image_processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
        return cls(model.eval(), AutoTokenizer.from_pretrained(directory), image_processor)

    def inputs(self, samples: list[dict], directory: Path, *, with_answers: bool) -> dict[str, Tensor]:
        """A batch for the model, padded on the left; media paths are relative to ``directory``."""
        pictures: list[Image.Image] = [Image.open(directory / name) for sample in samples for name in sample["images"]]
        videos = [directory / name for sample in samples for name in sample["videos"]]
        inputs, counts = {}, {}
        if pictures:
            inputs |= self.image_processor(images=pictures, return_tensors="pt")
            counts["image"] = self._num_tokens(inputs["image_grid_thw"])
        if videos:
            inputs |= self._videos(videos)
            counts["video"] = self._num_tokens(inputs["video_grid_thw"])
        rows = [self._token_ids(sample, counts, with_answer=with_answers) for sample in samples]
        longest = max(len(row) for row in rows)
        token_ids = torch.full((len(rows), longest), cast(int, self.tokenizer.pad_token_id))
        mask = torch.zeros_like(token_ids)
        for index, row in enumerate(rows):
            token_ids[index, longest - len(row) :] = torch.tensor(row)
            mask[index, longest - len(row) :] = 1
        config = self.model.config
        kinds = (token_ids == config.image_token_id).int() + 2 * (token_ids == config.video_token_id).int()
        return {"input_ids": token_ids, "attention_mask": mask, "mm_token_type_ids": kinds, **inputs}

    def _videos(self, paths: list[Path]) -> dict[str, Tensor]:
        """The output of transformers' video processor, which needs torchvision, for all frames of each file.

        The image processor turns one picture into a pair of equal frames.  So a pair of two frames takes the first half
        of one result and the second half of the other.
        """
        patches, grids, seconds = [], [], []
        for path in paths:
            frames, seconds_of_frame = read_video(path)
            pictures = self.image_processor(images=frames, return_tensors="pt")
            rows, columns = pictures["image_grid_thw"][0, 1:].tolist()
            # [pairs, frame of the pair, patches, channels, half, pixels]
            values = pictures["pixel_values"].view(-1, 2, rows * columns, 3, 2, self.image_processor.patch_size**2)
            pairs = torch.stack([values[:, half, :, :, half] for half in (0, 1)], dim=3)
            patches.append(pairs.flatten(0, 1).flatten(1))
            grids.append((len(frames) // 2, rows, columns))
            seconds.append(2 * seconds_of_frame)
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids),
                "second_per_grid_ts": torch.tensor(seconds)}  # fmt: skip

    def _num_tokens(self, grids: Tensor):
        return iter((grids.prod(dim=1) // self.image_processor.merge_size**2).tolist())

    def _token_ids(self, sample: dict, counts: dict, *, with_answer: bool) -> list[int]:
        messages = [
            {"role": message["role"], "content": _parts(message["content"])}
            for message in (sample["messages"] if with_answer else sample["messages"][:-1])
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not with_answer)
        text = MEDIA_TOKEN.sub(lambda token: token[0] * next(counts[token[1]]), cast(str, text))
        return self.tokenizer(text)["input_ids"]

    @torch.inference_mode()
    def answers(self, samples: list[dict], directory: Path) -> list[str]:
        """The model's answer to each question, decoded greedily."""
        answers = []
        for start in range(0, len(samples), BATCH_SIZE):
            inputs = self.inputs(samples[start : start + BATCH_SIZE], directory, with_answers=False)
            model: Any = self.model  # transformers' types do not take it for a model that generates
            output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
            new_tokens = output[:, inputs["input_ids"].shape[1] :]
            answers += [text.strip() for text in self.tokenizer.batch_decode(new_tokens, skip_special_tokens=True)]
        return answers

    @torch.inference_mode()
    def logits(self, samples: list[dict], directory: Path) -> dict[str, Tensor]:
        """Logits and token ids of every sample, question and answer together, without padding."""
        inputs = self.inputs(samples, directory, with_answers=True)
        batch = self.model(**inputs).logits
        found = {}
        for index, mask in enumerate(inputs["attention_mask"].bool()):
            found[f"token_ids.{index}"] = inputs["input_ids"][index][mask]
            found[f"logits.{index}"] = batch[index][mask].contiguous()
        return found


def read_video(path: Path) -> tuple[list[Image.Image], float]:
    """All frames of a video, and the duration of each in seconds."""
    with av.open(str(path)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
        return frames, float(1 / container.streams.video[0].average_rate)


def _parts(content: str) -> list[dict]:
    """Convert ``<image>`` and ``<video>`` tags to the structured content that chat templates take."""
    pieces = MEDIA_TAG.split(content)  # every second piece is the name of a tag
    parts = [{"type": piece} if index % 2 else {"type": "text", "text": piece} for index, piece in enumerate(pieces)]
    return [part for part in parts if part != {"type": "text", "text": ""}]


def expected_answer(sample: dict) -> str:
    """The answer in the dataset."""
    return sample["messages"][-1]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in Hugging Face format")
    parser.add_argument("--dataset", type=Path, required=True, help="JSON file; media paths are relative to it")
    parser.add_argument("--answers", type=Path, required=True, help="JSON file to write the answers to")
    parser.add_argument("--logits", type=Path, required=True, help="safetensors file to write logits to")
    parser.add_argument("--num-logits", type=int, default=8, help="samples whose logits are written")
    flags = parser.parse_args()
    samples = json.loads(flags.dataset.read_text(encoding="utf-8"))
    reader = Reader.load(flags.model)
    directory = flags.dataset.parent
    save_file(reader.logits(samples[: flags.num_logits], directory), flags.logits)
    answers = reader.answers(samples, directory)
    flags.answers.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
    right = sum(answer == expected_answer(sample) for answer, sample in zip(answers, samples, strict=True))
    print(f"{right} of {len(samples)} held-out answers are right")


if __name__ == "__main__":
    main()
