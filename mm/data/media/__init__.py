"""What does the ViT see of a file?  Images and videos become patches."""
