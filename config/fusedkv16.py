# FusedKV (Lin et al., 2026); all else is default, as in config/wm16.py
out_dir = "out/fusedkv16"
dataset = "fineweb-edu"
kv = "fusedkv"
