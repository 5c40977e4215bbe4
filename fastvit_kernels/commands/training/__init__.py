"""What `train` is made of: settings, images, the run, its folder and checkpoints, its report."""
