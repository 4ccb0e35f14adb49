"""A file a basename: `cases()` lists what is measured, with data and distributions; `extra(device)` makes rows of any
other kind; PEERS names the packages to measure beside. An op without a file is measured on its quick sample."""
