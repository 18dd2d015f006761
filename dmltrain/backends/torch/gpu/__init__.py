"""What moves between a GPU and the host: copies on streams of their own, pinned memory, and codecs on the GPU."""
