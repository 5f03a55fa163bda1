# LCKV, 4 layers with keys and values of their own (Wu and Tu, 2024), by its own schedule,
# Jacobi with 7 + 2 passes over the condensed layers alone; all else is default, as in wm16.py
out_dir = "out/lckv16_w4"
dataset = "fineweb-edu"
kv = "lckv"
lckv_w = 4
