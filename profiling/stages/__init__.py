"""The plan of `profiling/cuda.sh`: what is measured on a GPU, in stages with a budget."""
