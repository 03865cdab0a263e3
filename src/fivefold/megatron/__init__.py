"""The only entry point to Megatron-Core: no other package imports it."""

import warnings

# Megatron-Core warns at import that Transformer Engine and apex are missing, which we do not need, and calls collectives
# by names that newer releases of torch have renamed. Its optimizer reads `.grad` of tensors that are not leaves.
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
warnings.filterwarnings(
    "ignore",
    message=r"The \.grad attribute of a Tensor that is not a leaf",
    category=UserWarning,
    module=r"megatron\.core\.optimizer\.optimizer$",
)
