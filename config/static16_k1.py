# the paper's ablation of the router, one channel; all else is default, as in config/wm16.py
out_dir = "out/static16_k1"
dataset = "fineweb-edu"
kv = "whitematter"
router = "static"  # mixing weights that do not depend on the token
n_channels = 1
