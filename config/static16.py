# the paper's ablation of the router; all else is default, as in config/wm16.py
out_dir = "out/static16"
dataset = "fineweb-edu"
kv = "whitematter"
router = "static"  # mixing weights that do not depend on the token
