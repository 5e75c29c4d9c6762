"""The trainer's logits for a checkpoint in Hugging Face format, with the whole model in one process.

Writes the same output as ``demo.evaluate``, but with the trainer's data path, model and kernels.

    python -m demo.trainer_logits --model DIR --mm-model JSON --mm-data JSON --dataset JSON --logits FILE
"""

import argparse
import dataclasses
from pathlib import Path

from mm.device.device import Device

DEVICE = Device.pick("cpu")  # before anything imports megatron

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from mm.batch import Microbatch  # noqa: E402
from mm.checkpoint.source import open_to_train  # noqa: E402
from mm.config.data import DataConfig, read_data  # noqa: E402
from mm.config.model import ModelConfig, read_model  # noqa: E402
from mm.data.encode import SampleEncoder  # noqa: E402
from mm.data.index.dataset import Dataset  # noqa: E402
from mm.model.load import fill  # noqa: E402
from mm.model.stage import Chunk, Stage  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402


def trainer_logits(directory: Path, model: ModelConfig, data: DataConfig, num_samples: int) -> dict[str, Tensor]:
    """``logits.N`` [num_tokens, vocabulary] and ``token_ids.N`` of the first samples of ``data``.

    ``model`` must be placed on one stage.  Joins and leaves a process group of size one.
    """
    mesh = parallel.start(DEVICE, model, tp_size=1)
    stage = Stage(model, mesh, "fp32", DEVICE)
    (chunk,) = stage.chunks
    fill(stage, stage.weights, open_to_train(directory, model), mesh)
    encoder = SampleEncoder.from_config(data, model, seq_length=model.language.max_position_embeddings)
    dataset = Dataset(data)
    found = {}
    with torch.no_grad():
        for index in range(min(num_samples, len(dataset))):
            microbatch = encoder.encode(dataset[index])
            found[f"token_ids.{index}"] = microbatch.token_ids
            found[f"logits.{index}"] = _logits(chunk, microbatch)
    parallel.stop()
    return found


def _logits(chunk: Chunk, microbatch: Microbatch) -> Tensor:
    inputs = chunk.prepare(microbatch, None)
    return chunk.text_decoder.logits(chunk.hidden_states(inputs, None)).contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in Hugging Face format")
    parser.add_argument("--mm-model", required=True, help="model JSON with one pipeline stage")
    parser.add_argument("--mm-data", required=True, help="data JSON, for the columns and the image sizes")
    parser.add_argument("--dataset", type=Path, required=True, help="the samples, instead of the data JSON's")
    parser.add_argument("--logits", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--num-samples", type=int, default=8)
    flags = parser.parse_args()
    data = dataclasses.replace(
        read_data(flags.mm_data).value,
        model_name_or_path=str(flags.model),
        dataset=(str(flags.dataset),),
        dataset_dir=str(flags.dataset.parent),
    )
    save_file(trainer_logits(flags.model, read_model(flags.mm_model).value, data, flags.num_samples), flags.logits)


if __name__ == "__main__":
    main()
