#!/bin/bash
# Put an order into the tube "orders": ./produce.sh 17. Bash alone speaks the protocol.
set -eu
exec 3<> "/dev/tcp/127.0.0.1/${PORT:-11300}"
body="{\"order\": $1}"
printf 'use orders\r\nput 1024 0 60 %d\r\n%s\r\n' ${#body} "$body" >&3 # priority, delay, time to run
read -r -u 3 _ using
read -r -u 3 reply number
[ "$reply" = INSERTED ] || { echo "$reply" >&2; exit 1; }
echo "put ${number%$'\r'}"
