-- Time: move jobs that come due, and prune finished jobs.

local come_due, prune

do

-- Handle an entry of B:due that belongs to a job. An outdated entry changes nothing.
local function look_at(kind, j)
  if kind == 'l' then
    if j.state == RUNNING and j.deadline > 0 and j.deadline <= now then
      local worker = call('HGET', B .. ':o:' .. j.owner, 'name') or ''
      local late = died(Outcome.RETRY, 'ttr passed without an ack')
      late.delay = -1 -- the retry policy says the delay, for a task too
      close_attempt(j, worker, late)
    end
  elseif j.state >= RUNNING then
    return
  elseif kind == 'x' then
    unplace(j)
    finish(j, EXPIRED, TOO_LATE)
  elseif j.state == SCHEDULED then
    count(j.queue, 'scheduled', -1)
    place(j, j.due)
  end
end

-- Move the entries that are due; true when more may be due than one call should move. Then most calls answer 'due',
-- and the client calls `housekeeping` first.
function come_due()
  local most = CHUNK / 2
  if is_sealed() then return false end
  local due = call('ZRANGEBYSCORE', K_DUE, '-inf', now, 'LIMIT', 0, most)
  if #due == 0 then return false end
  call_all('ZREM', K_DUE, due)
  due_moved = true
  local ids = {}
  for _, member in ipairs(due) do
    if string.find(member, '^[jxl]') then ids[#ids + 1] = sub(member, 2) end
  end
  read_ahead(ids)
  for _, member in ipairs(due) do
    local kind = sub(member, 1, 1)
    if kind == 'f' then
      flows.resumed = true
    elseif kind == 'a' then
      Partitions.came_due(sub(member, 2))
    elseif kind == 'g' then
      QueueLimits.came_due(sub(member, 2))
    elseif kind == 'w' then
      Partitions.walk(sub(member, 2))
    else
      local j = load_job(sub(member, 2))
      if j then look_at(kind, j) end
      if #flows.ends > 0 then flow() end -- a dependent that ends with this job must not come due any more
    end
  end
  return #due == most
end

end

-- Microseconds until the next entry comes due, 0 when one is due now; -1 when there is no entry.
local function next_due()
  if is_sealed() then return -1 end
  local first = call('ZRANGE', K_DUE, 0, 0, 'WITHSCORES')
  return first[1] and math.max(0, first[2] - now) or -1
end

do

local JUMPS = 32 -- the most times of keeping that one call looks through

local function forget_finished(id)
  local data = jobs[id]
  if type(data) == 'string' and not flagged(byte(data, 10), NOTED + RESULT) then -- the hot path
    if flagged(byte(data, 10), LINKED) then unlink(id) end
    jobs[id] = false
    touch_id(id)
  else
    forget(load_job(id))
  end
end

-- Whether an entry is outdated: its job is gone, runs again, or has an entry in another class.
local function is_stale(id, class)
  local data = jobs[id]
  if type(data) == 'string' and class < 2 then return byte(data, 9) < SUCCEEDED end -- the hot path
  local j = load_job(id)
  return not j or j.state < SUCCEEDED or class == 2 and class_of(j) ~= 2
end

-- Forget finished jobs of a class, if their entries are not outdated.
local function forget_all(class, ids)
  read_ahead(ids)
  for _, id in ipairs(ids) do
    if not is_stale(id, class) then forget_finished(id) end
  end
  call_all('ZREM', B .. ':fin:' .. class, ids)
  return #ids
end

-- The ids of finished jobs that ended by a time, the first to go first, `most` at most. Behind a later end there may be
-- earlier ones, of jobs that are kept longer. All jobs with later ends that are kept as long lie together: skip these.
local function ended_by(class, time, most)
  local ids, from = {}, '-inf'
  for _ = 1, JUMPS do
    local some, jump = call('ZRANGEBYSCORE', B .. ':fin:' .. class, from, '+inf', 'WITHSCORES', 'LIMIT', 0, most - #ids)
    for i = 1, #some, 2 do
      local j = time < now and load_job(some[i])
      if j and j.finished > time then
        jump = text_of(now + some[i + 1] - j.finished + 1)
        break
      end
      ids[#ids + 1] = some[i]
    end
    if not jump then break end
    from = jump
  end
  return ids
end

-- Forget finished jobs that are too old or too many, the first to go first, `most` at most; true when there may be more.
-- First check up to `flows_most` finished jobs of workflows, and up to `partitions_most` idle partitions, if given.
function prune(most, flows_most, partitions_most)
  if is_sealed() then return false end
  local _, kept_most, _, protect = unpk('>dddd', ARGV[2])
  local more = partitions_most and Limits.sweep(partitions_most) >= partitions_most
  more = flows_most and part_from_flows(flows_most) >= flows_most or more
  local pruned = 0
  for class = 0, 2 do
    local key = B .. ':fin:' .. class
    pruned = pruned + forget_all(class, call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, most - pruned))
  end
  local surplus = call('ZCARD', B .. ':fin:0') + call('ZCARD', B .. ':fin:1') - kept_most
  for class = 0, 1 do
    local few = math.min(surplus, most - pruned)
    if few <= 0 then break end
    local gone = forget_all(class, ended_by(class, class == 0 and now or now - protect, few))
    pruned, surplus = pruned + gone, surplus - gone
  end
  return pruned >= most or more
end

end
