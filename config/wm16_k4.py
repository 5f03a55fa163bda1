# the paper's model with a quarter of the cache; all else is default, as in config/wm16.py
out_dir = "out/wm16_k4"
dataset = "fineweb-edu"
kv = "whitematter"
n_channels = 4
