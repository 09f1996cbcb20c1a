#!/bin/sh
# Put an order into the queue "orders": ./produce.sh 17.
set -eu
server=${SERVER:-http://127.0.0.1:8333}
curl --fail-with-body --silent --show-error --json "{\"order\": $1}" "$server/v1/queues/orders/messages"
echo
