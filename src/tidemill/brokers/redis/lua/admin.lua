-- Admin calls: act on jobs by their ids, and on queues.
--
-- ARGV  5 verb
--       cancel   6 'cancel' or 'terminate', then ids     kick   6 'force' or '', then ids     delete   6 '', then ids
--       queue    6 queue, 7 paused: '', '0', '1', 8 max_size: '' or a number
--       purge    6 queue, 7 number of entries to look at, at most, 8 place to go on from, see admin_purge.lua
--       forget   6 queue
--       recall   6 number of jobs at most
-- Returns {reply, 1 when `housekeeping` must go on, else 0}, or {'moved', where}. The reply is '0' or '1' for each id;
--       queue 0; purge {number of jobs purged, place to go on from}; forget 1 or 0; recall the number of jobs.

local function cancel(j)
  if j.state >= SUCCEEDED then return false end
  if j.state == RUNNING then
    if not flagged(j.flags, CANCELLING) then j.flags = j.flags + CANCELLING end
    if not flagged(j.flags, NOTED) then j.flags = j.flags + NOTED end
    save(j)
    log(j.id, ARGV[6] == 'terminate' and 'cancel was asked for, at once' or 'cancel was asked for', now / 1000000)
    call('RPUSH', B .. ':c:' .. j.owner, pack('>I8', j.token) .. ARGV[6])
    hint_owner(j.owner)
  else
    unplace(j)
    finish(j, CANCELLED, NOT_STARTED)
  end
  return true
end

local function delete(j)
  if j.state >= SUCCEEDED then
    if j.key ~= '' then Unique.forget(j) end
    unfinish(j)
  else
    if j.state == RUNNING then end_lease(j) else unplace(j) end
    leave(j, WAITING)
  end
  forget(j)
  return true
end

-- Change a queue's settings, and wake everybody whom the old settings kept waiting.
local function set_queue(queue, paused, max_size)
  local row = row_of(queue)
  if paused ~= '' then row.paused = paused == '1' end
  if max_size ~= '' then row.max_size = tonumber(max_size) end
  call('HSET', row.key, 'paused', row.paused and '1' or '0', 'max_size', row.max_size)
  for _, kind in ipairs(KINDS) do
    local line = kind .. queue
    if row.paused then
      call('ZREM', K_LINES, line)
    elseif call('EXISTS', B .. ':r:' .. line) == 1 then
      call('ZADD', K_LINES, 0, line)
      rings[line] = call('ZCARD', B .. ':r:' .. line)
    end
  end
  if not row.paused then Unknown.wake() end
  shrunk[queue] = true
end

-- Forget the counters and settings of a queue; its limit stays. Returns 1, or 0 when the queue has unfinished jobs.
local function forget_queue(queue)
  local row = find_row(queue)
  if not row then return 1 end
  if size_of(queue) > 0 then return 0 end
  for _, field in ipairs(call('HKEYS', row.key)) do
    if field ~= 'gated' and field ~= 'laned' then call('HDEL', row.key, field) end
  end
  call('ZREM', B .. ':queues', queue)
  rows[queue] = nil
  return 1
end

-- Delete the next jobs of a queue: {number of jobs, place to go on from}.
local function purge(queue, most, place)
  local ids, next_place = to_purge(queue, most, place)
  local many = 0
  for _, id in ipairs(ids) do
    local j = load_job(id) -- SCAN may name a job twice
    if j and delete(j) then many = many + 1 end
  end
  if many > 0 then count(queue, 'purged', many) end
  return {many, next_place}
end

local ACTS = {cancel = cancel, kick = kick, delete = delete}

-- '1' for each id that was acted upon, else '0'.
local function act_on_jobs(act)
  local done = {}
  for i = 7, #ARGV do
    local j = load_job(ARGV[i])
    done[#done + 1] = j and act(j, ARGV[6] == 'force') and '1' or '0'
    flow() -- jobs behind this one may end with it; the next acts must see that
  end
  return table.concat(done)
end

function Verbs.admin()
  local again = cached_reply() or departure()
  if again then return again end
  local verb, reply = ARGV[5], 0
  if verb == 'queue' then
    set_queue(ARGV[6], ARGV[7], ARGV[8])
  elseif verb == 'purge' then
    reply = purge(ARGV[6], tonumber(ARGV[7]), ARGV[8])
  elseif verb == 'forget' then
    reply = forget_queue(ARGV[6])
  elseif verb == 'recall' then
    reply = Carrier.recall(tonumber(ARGV[6]))
  else
    reply = act_on_jobs(ACTS[verb])
  end
  finish_step()
  return cache_reply({reply, flows_on() and 1 or 0})
end
