-- Adopt jobs of a departed store, in their states.
--
-- ARGV  5 mark, 6 the last number drawn there, 7 cursor, 8 number of schedules, then name and record of each;
--       then for each job seven arguments: id, record with its old seq, envelope, result, progress and lines of its log
--       (each behind its size), its wish if it has links, a limit or a key with a period, and its counts in B:wait if
--       it comes after others
-- Returns '0' or '1' for each job, then for each schedule, or {'moved', where}.

-- Take the key of a job, or wait for it, as the job did in its old store; false when the key is taken.
local function take_key(j, ends)
  local key = Unique.find(j.key)
  if not key then
    Unique.put(j.key, j.id, nil, ends, 0)
  elseif j.state == WAITING and key.holder and not key.successor then
    Unique.put(j.key, key.holder, j.id, 0, 0)
  else
    return false
  end
  return true
end

local function adopt_one(id, record, envelope, result, said, wish, wait, first)
  if load_job(id) then return '0' end
  local j = parse_job(id, record)
  local ends = 0 -- the time until which the job keeps its key even after success
  if j.key ~= '' and wish ~= '' and not flagged(j.flags, LINKED) then ends = math.floor(unpk('>d', wish, 26) * 1000000) end
  if ends <= now then ends = 0 end
  if j.key ~= '' and j.state < SUCCEEDED and not take_key(j, ends) then return '0' end
  j.seq = j.seq + first
  jobs[id], envs[id], fresh[id] = j, envelope, j.seq
  if result ~= '' then set_result(j, result) end
  if said ~= '' then
    local progress, line, at = unpk('>I4c0', said)
    if progress ~= '' then call('SET', B .. ':p:' .. id, progress) end
    at = 5 + #progress
    while at <= #said do
      line, at = unpk('>I4c0', said, at)
      call('RPUSH', B .. ':g:' .. id, line)
    end
  end
  if j.partition then Partitions.declare(j.partition, wish, true) end
  if flagged(j.flags, LINKED) then flows.links[id], flows.new[id] = wish, wish end
  if wait ~= '' then flows.waits[id], flows.counted[id] = parse_wait(wait), true end
  save(j)
  if j.state < SUCCEEDED and j.expires > 0 then add_due(j.expires, 'x' .. id) end
  if j.state >= SUCCEEDED then
    count(j.queue, COUNTER[j.state], 1)
    keep(j, true)
    if j.state == SUCCEEDED and ends > 0 and not Unique.find(j.key) then Unique.hold(j.key, id, ends) end
  elseif j.state == WAITING then
    count(j.queue, 'waiting', 1)
  else
    place(j, j.due)
  end
  return '1'
end

local function adopt_schedule(name, record)
  if call('HEXISTS', B .. ':schedule', name) == 1 then return '0' end
  local due = select(2, unpk('>I8d', record))
  local version = call('INCR', B .. ':seq')
  call('HSET', B .. ':schedule', name, pack('>I8', version) .. sub(record, 9))
  call('ZADD', B .. ':schedules', '0', name)
  if due > 0 then
    call('ZADD', B .. ':firing', string.format('%.0f', due * 1000000), pack('>I8', version) .. name)
    fire_sooner(due * 1000000)
  end
  return '1'
end

function Verbs.transfer_in()
  local again = cached_reply() or departure()
  if again then return again end
  local K_FROM = B .. ':from:' .. ARGV[5]
  local first = call('HGET', K_FROM, 'first')
  if not first then
    first = call('GET', B .. ':seq') or '0'
    call('INCRBY', B .. ':seq', ARGV[6])
  end
  call('HSET', K_FROM, 'cursor', ARGV[7], 'first', first)
  local taken = {}
  local schedules = tonumber(ARGV[8])
  for i = 9 + 2 * schedules, #ARGV, 7 do
    local id, record, envelope, result, said, wish, wait = unpack(ARGV, i, i + 6)
    taken[#taken + 1] = adopt_one(id, record, envelope, result, said, wish, wait, tonumber(first))
  end
  finish_step()
  for i = 9, 7 + 2 * schedules, 2 do taken[#taken + 1] = adopt_schedule(ARGV[i], ARGV[i + 1]) end
  return cache_reply(table.concat(taken))
end
