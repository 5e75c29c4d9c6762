"""Small copies of images, for pages."""

import io

from PIL import Image

from mm.data.media.video_file import Pixels


def jpeg(pixels: Pixels, longest_side: int) -> bytes:
    """An image of uint8 [height, width, 3] as JPEG, with at most ``longest_side`` pixels on each side."""
    image = Image.fromarray(pixels)
    image.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85)
    return stream.getvalue()
