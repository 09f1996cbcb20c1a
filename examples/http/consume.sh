#!/bin/sh
# Take orders from the queue "orders", for ever: ./consume.sh.
set -eu
server=${SERVER:-http://127.0.0.1:8333}
ask() { curl --fail-with-body --silent --show-error "$server/v1/$1" --json "$2"; }

while reply=$(ask reserve '{"queues": ["orders"], "timeout": 30}'); do # ours for its time to run
    receipt=$(echo "$reply" | sed -n 's/.*"receipt": *"\([^"]*\)".*/\1/p')
    [ "$receipt" ] || continue # nobody has put anything for half a minute
    echo "$reply" | sed 's/.*"order": *\([0-9]*\).*/order \1/'
    ask ack "{\"receipts\": [\"$receipt\"]}" > /dev/null # done; release gives it back, bury keeps it
done
