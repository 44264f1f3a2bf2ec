"""What every room stands on: names of files, whose code may run, PyTorch's private members."""
