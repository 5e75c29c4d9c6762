"""What does the ViT see of a file?  Pictures and videos become patches; videos in a process that can be killed."""
