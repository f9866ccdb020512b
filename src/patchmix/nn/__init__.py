"""Networks: the encoder (a timm VisionTransformer), the heads, the momentum copy."""
