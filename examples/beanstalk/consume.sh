#!/bin/bash
# Take orders from the tube "orders", for ever: ./consume.sh.
set -eu
export LC_ALL=C # sizes are bytes
exec 3<> "/dev/tcp/127.0.0.1/${PORT:-11300}"
ask() { printf '%s\r\n' "$1" >&3; IFS=$' \r' read -r -u 3 -a reply; }

ask "watch orders"
ask "ignore default" # which each client watches until it says so
while ask "reserve"; do # ours for its time to run
    [ "${reply[0]}" = RESERVED ] || { echo "${reply[*]}" >&2; exit 1; }
    IFS= read -r -u 3 -N $((reply[2] + 2)) body # and the end of its line
    order=${body#*:}
    echo "order" "${order//[^0-9]/}"
    ask "delete ${reply[1]}" # done; release would give it back, bury keep it for a human
done
