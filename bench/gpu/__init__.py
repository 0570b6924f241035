"""The phases of ``gpu_check``: each verifies or measures one thing on a GPU, and runs through on a CPU in a dry run."""
