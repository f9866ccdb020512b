"""Networks: the encoder (a timm VisionTransformer), the heads; `pyramid` is for detection."""

from patchmix.nn.heads import BatchNorm, PrototypeHead, mlp_head, two_layer_head
from patchmix.nn.tokens import TokenDropout, all_tokens, is_plain, project, region_tokens
from patchmix.nn.vit import create_encoder, initialize_as_mocov3, patch_size_of

__all__ = ["BatchNorm", "PrototypeHead", "TokenDropout", "all_tokens", "create_encoder"]
__all__ += ["initialize_as_mocov3", "is_plain", "mlp_head", "patch_size_of", "project", "region_tokens"]
__all__ += ["two_layer_head"]
