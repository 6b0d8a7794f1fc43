"""Training on megatron-core: tensor, pipeline, context and expert parallelism for one contract."""

import logging
import warnings

# What the import of Megatron says on machines without these libraries: the package has its own
# modules for what they would do, and says in one line which it takes (machine.py).
warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed")
warnings.filterwarnings("ignore", r"Only transformer-engine.* supports MoE experts")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
