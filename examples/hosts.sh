# For scripts that read the addresses of machines.

fail() {
    echo "$*" >&2
    exit 2
}

# read_hosts FILE: `nodes` from a file with one address per line; words after an address, and lines with #, are left out.
read_hosts() {
    mapfile -t nodes < <(awk 'NF && $1 !~ /^#/ {print $1}' "$1")
    [[ ${#nodes[@]} -gt 0 ]] || fail "$1 has no addresses; expected one per line"
}
