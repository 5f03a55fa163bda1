# the paper's model with a sixteenth of the cache; all else is default, as in config/wm16.py
out_dir = "out/wm16_k1"
dataset = "fineweb-edu"
kv = "whitematter"
n_channels = 1
