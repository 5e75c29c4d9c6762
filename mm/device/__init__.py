"""The only folder that knows cuda, npu and cpu."""
