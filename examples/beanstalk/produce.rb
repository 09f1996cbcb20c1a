# Put an order into the tube "orders": gem install beaneater, then ruby produce.rb 17.
require "beaneater"
require "json"

queue = Beaneater.new("127.0.0.1:#{ENV.fetch("PORT", 11300)}")
reply = queue.tubes["orders"].put({ order: ARGV[0].to_i }.to_json, ttr: 60)
puts "put #{reply[:id]}"
