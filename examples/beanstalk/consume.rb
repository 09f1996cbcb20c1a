# Take orders from the tube "orders", for ever: gem install beaneater, then ruby consume.rb.
require "beaneater"
require "json"

queue = Beaneater.new("127.0.0.1:#{ENV.fetch("PORT", 11300)}")
queue.tubes.watch!("orders")
loop do
  job = queue.tubes.reserve # ours for its time to run
  puts "order #{JSON.parse(job.body)["order"]}"
  job.delete # done; release would give it back, bury keep it for a human
end
