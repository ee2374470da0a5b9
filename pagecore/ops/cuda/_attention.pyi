from pagecore.arrays import Tensor
from pagecore.ops import AttentionPlan

def plan_on_device(plan: AttentionPlan, seq_lens: Tensor, cu_query_lens: Tensor | None, num_tokens: int) -> Tensor: ...
