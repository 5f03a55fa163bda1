# LCKV, 7 layers with keys and values of their own (Wu and Tu, 2024); all else as in config/wm16.py
out_dir = "out/lckv16_w7"
dataset = "fineweb-edu"
kv = "lckv"
lckv_w = 7
n_groups = 1  # Jacobi, over the condensed layers alone
n_nograd = 7
n_grad = 2
