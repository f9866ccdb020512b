"""Networks: the encoder (a timm VisionTransformer), the heads; `pyramid` is for detection. Here: what methods need."""

from patchmix.nn.heads import BatchNorm, PrototypeHead, mlp_head, two_layer_head
from patchmix.nn.tokens import TokenDropout, all_tokens, is_plain, project, region_tokens
from patchmix.nn.vit import patch_size_of

__all__ = ["BatchNorm", "PrototypeHead", "TokenDropout", "all_tokens", "is_plain", "mlp_head", "patch_size_of"]
__all__ += ["project", "region_tokens", "two_layer_head"]
