"""`python -m profiling.stages`: first of all it says which packages are missing."""

import os
import sys
from importlib.util import find_spec

# By the name that is imported, with the name of the package where that is another.
NEEDED = {
    **{name: name for name in ("torch", "triton", "lightning", "numpy", "pandas", "pydantic")},
    **{name: name for name in ("fvcore", "jsonargparse", "torchmetrics", "pyarrow", "scipy")},
    **{name: name for name in ("matplotlib", "seaborn", "rich", "filelock", "safetensors")},
    **{"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "markdown_it": "markdown-it-py"},
    **{"typeshed_client": "jsonargparse[signatures]", "PIL": "pillow"},
}


def missing_packages() -> list[str]:
    """Return the packages that are not installed."""
    return sorted(package for name, package in NEEDED.items() if find_spec(name) is None)


def start(arguments: list[str]) -> int:
    """Check what is installed, set what must be set before kernels are imported, and run."""
    gone = missing_packages()
    if gone:
        print(f"error: packages are missing: pip install {' '.join(gone)}", file=sys.stderr)
        return 2
    if "--rehearse" in arguments:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    command = ["bash profiling/cuda.sh", *(["--rehearse"] if "--rehearse" in arguments else [])]
    os.environ["PROFILING_COMMAND"] = " ".join(command)  # for the rows and pages
    # Asked by NVML whether there is a GPU, PyTorch does not start CUDA, so stages can be forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from profiling.stages.command import main

    return main(arguments)


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
