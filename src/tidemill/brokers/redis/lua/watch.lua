-- Falling asleep until jobs have finished, the first of them has, or a queue has room, unless it is so
-- already.
--
-- ARGV  5 verb, 6 sleeper
--       jobs    7… ids         first   7… ids        space   7 queue        leave   7… ids
-- Returns -2 when it holds already, else microseconds until something is due (-1 never); 'due' when ticks are
-- to go on with what came due before it is called again.

local verb, sleeper = ARGV[5], ARGV[6]

if verb == 'leave' then
  for i = 7, #ARGV do
    local channels = call('HGET', K_WAITS, ARGV[i])
    if channels then
      local rest = {}
      for other in string.gmatch(channels, '%S+') do
        if other ~= sleeper then rest[#rest + 1] = other end
      end
      if #rest > 0 then
        call('HSET', K_WAITS, ARGV[i], table.concat(rest, ' '))
      else
        call('HDEL', K_WAITS, ARGV[i])
      end
    end
  end
  return 0
end

if come_due() then
  finish_step()
  return 'due'
end
flush()
local open = {}
if verb ~= 'space' then
  local ids = {}
  for i = 7, #ARGV do ids[i - 6] = ARGV[i] end
  read_ahead(ids)
  for _, id in ipairs(ids) do
    local j = load_job(id)
    if j and j.state < SUCCEEDED then open[#open + 1] = id end
  end
  if verb == 'first' and #open < #ids then open = {} end
else
  local row = find_row(ARGV[7])
  flush()
  if row and row.max_size > 0 and size_of(ARGV[7]) >= row.max_size then open[1] = ARGV[7] end
end
finish_step() -- of what came due, before our own name is on the list
if #open == 0 then return -2 end
if verb == 'space' then
  call('SADD', B .. ':space:' .. ARGV[7], sleeper)
else
  for _, id in ipairs(open) do
    local channels = call('HGET', K_WAITS, id)
    if not channels then
      call('HSET', K_WAITS, id, sleeper)
    elseif not string.find(' ' .. channels .. ' ', ' ' .. sleeper .. ' ', 1, true) then
      call('HSET', K_WAITS, id, channels .. ' ' .. sleeper)
    end
  end
end
return next_due()
