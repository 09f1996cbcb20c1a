// Take orders from the tube "orders", for ever: go run consume.go.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/textproto"
	"os"
)

func main() {
	port := os.Getenv("PORT")
	if port == "" {
		port = "11300"
	}
	queue, err := textproto.Dial("tcp", "127.0.0.1:"+port)
	if err != nil {
		log.Fatal(err)
	}
	defer queue.Close()

	ask := func(format string, args ...any) string {
		if err := queue.PrintfLine(format, args...); err != nil {
			log.Fatal(err)
		}
		reply, err := queue.ReadLine()
		if err != nil {
			log.Fatal(err)
		}
		return reply
	}

	ask("watch orders")
	ask("ignore default") // which each client watches until it says so
	for {
		var number, size uint64
		reply := ask("reserve") // ours for its time to run
		if _, err := fmt.Sscanf(reply, "RESERVED %d %d", &number, &size); err != nil {
			log.Fatal(reply)
		}
		body := make([]byte, size+2) // and the end of its line
		if _, err := io.ReadFull(queue.R, body); err != nil {
			log.Fatal(err)
		}
		var job struct{ Order int }
		if err := json.Unmarshal(body, &job); err != nil {
			log.Fatal(err)
		}
		fmt.Println("order", job.Order)
		ask("delete %d", number) // done; release would give it back, bury keep it for a human
	}
}
