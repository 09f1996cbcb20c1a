-- Accept a job that needs only its place in a queue. Callers that enqueue one by one use this hot path, which has none
-- of the machinery of the other functions.
--
-- ARGV  1 session, 2 serial, 3 id, 4 record behind its seq, 5 envelope, 6 its LINE, 7 its rank,
--       8 microseconds to add to the clock
-- Returns 1; {'id', id} when the id is taken; 0 when the put needs more: the queue is new, or has a bound or a limit,
--       or the store moves. With 0 nothing was stored, and the client calls `put` under the same serial.

local ONE = '\1' -- 1 in msgpack
local of_store, of_line, K_QUEUE, K_READY, K_SEQ -- names of the last call: making them anew costs as much as a command

function Verbs.put_one()
  local K_REPLY, serial, id, line, record = B .. ':said:' .. ARGV[1], ARGV[2], ARGV[3], ARGV[6], ARGV[4]
  if of_store ~= B or of_line ~= line then
    of_store, of_line = B, line
    K_QUEUE, K_READY, K_SEQ = B .. ':q:' .. sub(line, 2), B .. ':r:' .. line, B .. ':seq'
  end
  local cached = call('SET', K_REPLY, serial .. ONE, 'EX', '600', 'GET')
  if cached and #cached > 8 and number_in(cached) >= number_in(serial) then
    call('SET', K_REPLY, cached, 'EX', '600')
    return cmsgpack.unpack(sub(cached, 9))
  end
  local row = call('HMGET', K_QUEUE, 'paused', 'max_size', 'moved', 'gated')
  if not row[1] or row[2] ~= '0' or row[3] or row[4] then
    call('SET', K_REPLY, cached or '', 'EX', '600')
    return 0
  end
  local number = call('INCR', K_SEQ)
  local seq8 = pack('>I8', number)
  if call('HSETNX', K_JOB, id, seq8 .. record) == 0 then
    call('SET', K_REPLY, cached or '', 'EX', '600')
    return {'id', id}
  end
  call('HSET', K_ENV, id, ARGV[5])
  call('ZADD', K_ALL, text_of(number), id)
  call('HINCRBY', K_QUEUE, 'accepted', '1')
  local open = row[1] == '0'
  local wanted = open and call('EXISTS', K_ASLEEP) == 1
  if wanted and HandOff.give(line, id, seq8, ARGV[7], record, ARGV[5], ARGV[8]) then return 1 end
  call('ZADD', K_READY, ARGV[7], seq8 .. id)
  if open then call('ZADD', K_LINES, '0', line) end
  return 1
end
