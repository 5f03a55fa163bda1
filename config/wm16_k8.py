# the paper's half-cache model; all else is default, as in config/wm16.py
out_dir = "out/wm16_k8"
dataset = "fineweb-edu"
kv = "whitematter"
n_channels = 8
