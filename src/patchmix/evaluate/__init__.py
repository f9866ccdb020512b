"""How good is a backbone? Features, kNN, linear, fine-tune, detection."""
