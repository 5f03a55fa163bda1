# the paper's model with an eighth of the cache; all else is default, as in config/wm16.py
out_dir = "out/wm16_k2"
dataset = "fineweb-edu"
kv = "whitematter"
n_channels = 2
