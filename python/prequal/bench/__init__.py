"""How times are taken, kept and judged. Nothing here is imported by `import prequal`.

`prequal bench` measures (runner, over the shapes of shapes/<basename>.py), writes evidence and draws it (evidence,
charts); `prequal ablate` and `prequal.verify_replacement` look at a user's own work. Everything that decides is a pure
function of numbers; what touches a GPU or a clock stands behind `device.Device`.
"""
