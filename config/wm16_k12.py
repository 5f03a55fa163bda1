# the paper's model with three quarters of the cache; all else is default, as in config/wm16.py
out_dir = "out/wm16_k12"
dataset = "fineweb-edu"
kv = "whitematter"
n_channels = 12
