-- Accept jobs: new ones, and jobs whose key another job has already.
-- A job is four arguments: id, record behind its seq, envelope, wish. The wish is the rule for a conflict of keys,
-- delay, at, expires. If the job comes before or after others, these follow: its wait condition (0 none, 1 success,
-- 2 any end, 3 failure, 4 all, as a barrier), the number of inputs, the number of jobs behind it, these jobs, and the
-- inputs. Else, if it has a key: the period of the key and the longest wait. If it is under a limit by name, the wish
-- ends in the limit's settings. The wish is empty when the job has neither key nor times nor links nor a limit.

local Placed = {CREATED = 0, KEPT = 1, REPLACED = 2, MERGED = 3, SUCCESSOR = 4}
local Conflict = {KEEP = 0, REJECT = 1, REPLACE = 2, MERGE = 3}
local RECORD_RANK = 19 -- the offset of the rank in the record that the client wrote

local put_one

do

local AT_ONCE_ALONE = ('\0'):rep(26) -- a wish of links only, for a job that waits for nothing

-- Store a new job. If `latest` is given, the job is due by then, whatever its delay.
local function insert(id, record, envelope, wish, state, latest)
  seq = seq + 1
  local seq8 = pack('>I8', seq)
  envs[id], fresh[id] = envelope, seq
  touch_id(id)
  local linked, limited = false, false
  if wish ~= '' then linked, limited = flagged(byte(record, 2), LINKED), flagged(byte(record, 2), LIMITED) end
  if linked then
    flows.links[id], flows.new[id] = flows.links[id] or wish, wish
    enlist(id, links_of(id))
  end
  if wish == '' or linked and not limited and sub(wish, 1, 26) == AT_ONCE_ALONE then -- the hot path: ready at once
    local rank, queue = unpk('>I4Bc0', record, RECORD_RANK)
    jobs[id] = seq8 .. record
    local by = row_of(queue).by
    by.accepted = (by.accepted or 0) + 1
    enter_line((flagged(byte(record, 2), MESSAGE) and 'M' or 'T') .. queue, rank, seq8 .. id)
    return
  end
  local j = parse_job(id, seq8 .. record)
  jobs[id] = j
  if limited then Partitions.declare(j.partition, wish) end
  local _, delay, at, expires = unpk('>Bddd', wish)
  count(j.queue, 'accepted', 1)
  if expires > 0 then
    j.expires = now + math.floor(expires * 1000000)
    add_due(j.expires, 'x' .. id)
  end
  local due = due_of(delay, at)
  if latest and due > math.max(now, latest) then due = latest > now and latest or 0 end
  if linked and byte(wish, LINKS_WAITS) > 0 then
    state = WAITING
  end
  if state == WAITING then
    j.state, j.due = WAITING, due
    count(j.queue, 'waiting', 1)
  else
    place(j, due)
  end
end

-- Cancel a job whose key goes to another job.
local function displace(id, by)
  local j = load_job(id)
  unplace(j)
  finish(j, CANCELLED, 'replaced by ' .. by, true)
end

-- Merge a put into a job: the higher priority and the earlier time win, the body stays.
local function merge(j, record, wish)
  local rank = unpk('>I4', record, RECORD_RANK)
  local _, delay, at = unpk('>Bddd', wish)
  local due = j.due
  unplace(j)
  if j.state == SCHEDULED then due = math.min(due, due_of(delay, at)) end
  j.rank = math.min(j.rank, rank)
  place(j, due)
end

-- Store a job that takes a key: as its holder, or as the successor of a running holder.
local function put_last(id, record, envelope, wish, name, key, running)
  local period, max_wait, ends, since, latest = 0, 0, 0, 0, nil
  if not flagged(byte(record, 2), LINKED) then period, max_wait = unpk('>dd', wish, 26) end
  if period > 0 then ends = now + math.floor(period * 1000000) end
  if max_wait > 0 then
    if key and (key.successor or not running) then since = key.since end
    if since == 0 then since = now end
    latest = since + math.floor(max_wait * 1000000)
  end
  insert(id, record, envelope, wish, running and WAITING or READY, latest)
  Unique.put(name, running and key.holder or id, running and id or nil, ends, since)
end

-- Accept one job that was not refused: the outcome, and the id of the job that stands for it.
function put_one(id, record, envelope, wish)
  local _, name = unpk('>Bc0Bc0', record, RECORD_RANK + 4)
  if name == '' then
    insert(id, record, envelope, wish, READY)
    return Placed.CREATED, id
  end
  local key = Unique.find(name)
  if not key then
    put_last(id, record, envelope, wish, name, nil, false)
    return Placed.CREATED, id
  end
  if key.over then return Placed.KEPT, key.over end
  local current, conflict = load_job(key.holder), byte(wish, 1)
  local running = current.state == RUNNING
  if conflict == Conflict.MERGE and not running then
    merge(current, record, wish)
    return Placed.MERGED, key.holder
  end
  if conflict ~= Conflict.REPLACE then return Placed.KEPT, key.holder end
  if key.successor then displace(key.successor, id) end
  if not running then displace(key.holder, id) end
  put_last(id, record, envelope, wish, name, key, running)
  return running and Placed.SUCCESSOR or Placed.REPLACED, id
end

end

-- Let go the waiting jobs among `many` jobs of the arguments, except the jobs in `on_hold`. No more jobs will
-- come before these jobs.
local function begin_all(from, many, on_hold)
  for i = from, from + many * 4 - 1, 4 do
    local record, wish = ARGV[i + 1], ARGV[i + 3]
    if flagged(byte(record, 2), LINKED) and byte(wish, LINKS_WAITS) > 0 and not on_hold[ARGV[i]] then
      count_down(ARGV[i], false, '')
    end
  end
end

-- Put the followers of a verdict. Settling must not fail, so `max_size` does not hold here. A job is left out
-- when its id is taken, or when its key is taken and its rule is to reject.
local function follow(from, many)
  if many == 0 then return end
  seq = call('INCRBY', B .. ':seq', many) - many
  flow() -- first count down earlier ends: a dependent of a follower may be gone after that
  local left_out = {}
  for i = from, from + many * 4 - 1, 4 do
    local id, record = ARGV[i], ARGV[i + 1]
    local _, key = unpk('>Bc0Bc0', record, RECORD_RANK + 4)
    local rejected = key ~= '' and byte(ARGV[i + 3], 1) == Conflict.REJECT and Unique.find(key)
    if not rejected and not load_job(id) then
      put_one(id, record, ARGV[i + 2], ARGV[i + 3])
    else
      left_out[id] = true
    end
  end
  begin_all(from, many, left_out)
end
