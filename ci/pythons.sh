# Sourced: Pythons of this machine, wherever they lie.

# `pick 3.11` prints a Python of that version.
pick() {
  local name
  for name in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$name" -c "import sys; sys.exit(sys.version_info[:2] != tuple(map(int, '$1'.split('.'))))" 2> /dev/null; then
      command -v "$name"
      return
    fi
  done
  echo "no Python $1" >&2
  return 1
}

# `prefix 3.11` prints the folder that it is installed in.
prefix() {
  "$(pick "$1")" -c "import sys; print(sys.base_prefix)"
}
