"""The parts of a training program (dmltrain.fit): its data, its epochs, what it writes, and how it resumes."""
