-- Jobs that wait for others: they are counted down when the others end, in the same step.
--
-- The counts of a job lie in B:wait, apart from its record, so a large group is counted without writing the
-- record. `pending` and `failures` always hold the counts of the jobs before it, even after the job itself
-- has ended. So a failed job that is made ready again lets the jobs behind it wait again.
--
-- An end is {state, id, dependents}. A call counts down its ends in order, then the ends that follow from
-- these, up to a bound. The rest goes to B:flow, with an entry in B:due that makes the next caller go
-- on. B:flow survives a kill, and comes before all newer ends. An end has the ids it needs, since its job may be
-- gone by then. A job that is made ready again makes an entry too, so counts change in order.
--
-- flows  links (id → wish or parsed), new (id → wish to write), unlinked (ids), waits (id → counts),
--        counted (id → true: counts to write), held (queue → id → seq, or false), ends, first (index of the
--        next end), left (number of links to follow at most), stored (number of entries in B:flow), resumed
--        (B:flow goes on), flowing (`flow` is running)

local W_BARRIER = 4
local REVIVED = 9 -- in place of a state

local function due_of(delay, at)
  if delay > 0 then return now + math.floor(delay * 1000000) end
  return at > 0 and math.floor(at * 1000000) or 0
end

-- -- putting ---------------------------------------------------------------------------------------

-- Link a job that was put. If it waits for jobs, its count begins at 1, until all these jobs are put. Each waiting
-- job behind it waits for one more.
local function enlist(id, links)
  if links.waits > 0 then
    flows.waits[id], flows.counted[id] = {pending = 1, failures = 0, what = links.waits}, true
  end
  for _, name in ipairs(links.next) do
    local wait = wait_of(name)
    local j = wait and load_job(name)
    if j and j.state == WAITING then
      wait.pending = wait.pending + 1
      flows.counted[name] = true
    end
  end
end

-- -- ending ----------------------------------------------------------------------------------------

local count_down, flow, may_wait_anew, wait_anew

do

local W_SUCCESS, W_FAILURE = 1, 3 -- 2: any end
local HOW = {[FAILED] = ' failed', [CANCELLED] = ' was cancelled', [EXPIRED] = ' expired'}

-- End a waiting job because of the ends of the jobs before it.
local function drop(j, wait, state, why)
  wait.dropped = true
  unplace(j)
  finish(j, state, why)
end

-- Start a waiting job after all jobs before it have ended.
local function start(j, wait)
  if wait.what == W_BARRIER then
    if wait.failures > 0 then
      drop(j, wait, FAILED, text_of(wait.failures) .. ' of its jobs did not succeed')
    else
      unplace(j)
      finish(j, SUCCEEDED, '')
    end
    return
  end
  unplace(j)
  if wait.what == W_FAILURE and wait.failures == 0 then
    leave(j, WAITING)
    forget(j)
  else
    local links = links_of(j.id)
    place(j, due_of(links.delay, links.at))
  end
end

-- Let a job wait for one job fewer: a job before it has succeeded or failed.
function count_down(id, failed, why)
  local wait = wait_of(id)
  if not wait then return end -- the job is gone, or another job has its id now
  wait.pending = math.max(0, wait.pending - 1)
  if failed then wait.failures = wait.failures + 1 end
  flows.counted[id] = true
  local falls = wait.what == W_SUCCESS and failed and wait.failures == 1
  if wait.pending > 0 and not falls then return end
  local j = load_job(id)
  if not j or j.state ~= WAITING then return end
  if wait.what == W_SUCCESS and wait.failures > 0 then
    drop(j, wait, CANCELLED, why)
  elseif wait.pending == 0 then
    start(j, wait)
  end
end

-- False when a job can only end as before, because of how the jobs before it ended.
function may_wait_anew(wait)
  if wait.what == W_BARRIER then return not wait.dropped end
  return wait.what ~= W_SUCCESS or wait.failures == 0
end

-- Make an ended job, which no table holds, wait again for the jobs before it, or start it if they have ended.
function wait_anew(j, wait)
  j.state = WAITING
  count(j.queue, 'waiting', 1)
  save(j)
  if wait.pending == 0 then start(j, wait) end
end

-- An earlier job runs again, so its dependent `id` waits for one job more. A dependent that ended because of
-- the earlier job goes back to the waiting jobs.
local function wait_again(id)
  local wait = wait_of(id)
  local j = wait and load_job(id)
  if not j then return end
  wait.pending, wait.failures = wait.pending + 1, math.max(0, wait.failures - 1)
  flows.counted[id] = true
  if not wait.dropped or wait.failures > 0 and wait.what ~= W_BARRIER then return end
  unfinish(j)
  wait.dropped = false
  j.state, j.finished, j.prune, j.error = WAITING, 0, 0, ''
  count(j.queue, 'waiting', 1)
  if j.expires > 0 then add_due(j.expires, 'x' .. id) end
  save(j)
  add_end(id, REVIVED)
end

-- The next ends to follow: first the ends left by earlier calls, then the ends of this call.
local function next_ends()
  local some, size, most = {}, 0, math.min(flows.left, CHUNK)
  while size < most do
    local one
    if flows.stored > 0 then
      one = cmsgpack.unpack(call('LPOP', K_FLOW))
      flows.stored = flows.stored - 1
    else
      one = flows.ends[flows.first]
      if not one then break end
      flows.first = flows.first + 1
    end
    some[#some + 1] = one
    size = size + #one[3]
  end
  flows.left = flows.left - size
  return some
end

-- Read at once all jobs and counts that these ends need one by one.
local function read_behind(ends)
  local ids, soon, known = {}, {}, {}
  for _, one in ipairs(ends) do
    for _, id in ipairs(one[3]) do
      if known[id] == nil then ids[#ids + 1] = id end
      known[id] = (known[id] or 0) + 1
    end
  end
  read_waits_ahead(ids)
  for _, one in ipairs(ends) do
    for _, id in ipairs(one[3]) do
      local wait, times = flows.waits[id], known[id]
      if wait and times and (wait.pending <= times or one[1] ~= SUCCEEDED and wait.failures == 0) then
        soon[#soon + 1] = id
        known[id] = false
      end
    end
  end
  read_ahead(soon)
  read_links_ahead(soon)
end

-- Count down the dependents of all ends, and of the ends that follow from these.
function flow()
  if #flows.ends == 0 and not flows.resumed then return end
  flows.resumed, flows.flowing = false, true
  flows.stored = flows.stored or call('LLEN', K_FLOW)
  while flows.left > 0 and (flows.stored > 0 or flows.ends[flows.first]) do
    local ends = next_ends()
    read_behind(ends)
    for _, one in ipairs(ends) do
      local state, id = one[1], one[2]
      local failed = state ~= SUCCEEDED
      local why = failed and 'not run, since job ' .. id .. (HOW[state] or ' was deleted')
      for _, name in ipairs(one[3]) do
        if state == REVIVED then wait_again(name) else count_down(name, failed, why) end
      end
    end
  end
  flows.flowing = false
  local rest = {}
  for i = flows.first, #flows.ends do rest[#rest + 1] = cmsgpack.pack(flows.ends[i]) end
  call_all('RPUSH', K_FLOW, rest)
  flows.stored, flows.ends, flows.first = flows.stored + #rest, {}, 1
  if flows.stored > 0 then add_due(now, 'f') end
end

end

-- True when a later call must go on with B:flow.
local function flows_on() return (flows.stored or 0) > 0 end

-- -- finished jobs that others need ----------------------------------------------------------------

local part_from_flows

do

local is_needed

-- True while a job has not ended, or is a barrier with such a job behind it.
local function goes_on(id, known)
  if known[id] == nil then
    known[id] = false
    local j = load_job(id)
    if j then
      local wait = j.state >= SUCCEEDED and wait_of(id)
      known[id] = j.state < SUCCEEDED or wait and wait.what == W_BARRIER and is_needed(id, known) or false
    end
  end
  return known[id]
end

-- True while a job behind this one has not ended: then this job's result must not be pruned. Jobs behind a
-- barrier count as behind all jobs before the barrier. `known` keeps the answers, since many jobs may have the
-- same dependent.
is_needed = function(id, known)
  for _, name in ipairs(links_of(id).next) do
    if goes_on(name, known) then return true end
  end
  return false
end

-- Check finished jobs of workflows: each stays as long as a job behind needs it. Returns how many were checked.
function part_from_flows(most)
  local key = B .. ':fin:3'
  local ids, behind, parted, known, later = call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, most), {}, {}, {}, {}
  if #ids == 0 then return 0 end
  read_links_ahead(ids)
  for _, id in ipairs(ids) do
    for _, name in ipairs(links_of(id).next) do
      if #behind < CHUNK then behind[#behind + 1] = name end
    end
  end
  read_ahead(behind)
  local when = text_of(now + keep_class(3))
  for _, id in ipairs(ids) do
    if is_needed(id, known) then
      later[#later + 1] = when
      later[#later + 1] = id
    else
      parted[#parted + 1] = id
    end
  end
  call_all('ZADD', key, later)
  call_all('ZREM', key, parted)
  read_ahead(parted)
  for _, id in ipairs(parted) do
    local j = load_job(id)
    local class = class_of(j)
    prune_later(class, j.finished + keep_for(j, class), id)
  end
  flush_finished()
  return #ids
end

end
