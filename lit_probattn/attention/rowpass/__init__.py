"""The rows of a block, softmax and dropout, by the C library of the CPU (`kernels/cpu/rows.h`)."""
