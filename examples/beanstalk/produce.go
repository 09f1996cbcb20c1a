// Put an order into the tube "orders": go run produce.go 17. The protocol is lines of text, for
// which Go brings all that is needed.
package main

import (
	"fmt"
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

	body := fmt.Sprintf(`{"order": %s}`, os.Args[1])
	ask("use orders")
	reply := ask("put 1024 0 60 %d\r\n%s", len(body), body) // priority, delay, time to run
	var number uint64
	if _, err := fmt.Sscanf(reply, "INSERTED %d", &number); err != nil {
		log.Fatal(reply)
	}
	fmt.Println("put", number)
}
