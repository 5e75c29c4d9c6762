"""The demo: a tiny Qwen2.5-VL learns to read scanned digits through the same commands that a real run uses."""
