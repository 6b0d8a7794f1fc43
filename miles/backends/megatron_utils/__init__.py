"""Training on megatron-core: tensor, pipeline, context and expert parallelism for one contract."""

import logging
import warnings

# Megatron's words for developers. Where libraries are missing, this package has its own modules
# for what they would do, and says in one line which it takes (machine.py).
warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed")
warnings.filterwarnings("ignore", r"Only transformer-engine.* supports MoE experts")
warnings.filterwarnings("ignore", r"\w+ is experimental and still under active development")
warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor", module=r"megatron\.")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# What Megatron's reading and writing of torch_dist says each time.
_DCP = r"torch\.distributed\.checkpoint"
warnings.filterwarnings("ignore", r"torch\.distributed is disabled", module=_DCP)
warnings.filterwarnings("ignore", r"Please use DTensor instead", module=_DCP)
warnings.filterwarnings("ignore", r"The argument order of load has been changed", module=_DCP)
