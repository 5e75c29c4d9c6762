"""The output of transformers' video processor for given videos: ``torchvision_oracle IN.pt OUT.pt``, run separately.

It needs torchvision, whose published build is for CUDA and only loads with the two operators declared here.
"""

import sys

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float t) -> Tensor")

from transformers import Qwen2VLVideoProcessor  # noqa: E402

if __name__ == "__main__":
    given = torch.load(sys.argv[1])
    processor = Qwen2VLVideoProcessor(**given["settings"])
    results = []
    for frames in given["videos"]:
        found = processor(videos=[frames], do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt")
        results.append({"grid": found["video_grid_thw"], "pixels": found["pixel_values_videos"]})
    torch.save(results, sys.argv[2])
