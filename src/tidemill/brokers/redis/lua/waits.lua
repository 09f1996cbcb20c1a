-- List a sleeper that waits until all jobs have finished (jobs), one job has finished (first), or a queue has room
-- (space).
--
-- ARGV  5 verb, 6 sleeper
--       jobs    7… ids         first   7… ids        space   7 queue        leave   7… ids
-- Returns -2 when the wait is over already, else microseconds until something is due (-1 never); 'due' when
-- `housekeeping` must move due jobs before the next call; 0 for leave.

-- Take a sleeper off the lists of some jobs.
local function leave_waits(sleeper)
  for i = 7, #ARGV do
    local channels = call('HGET', K_WAITS, ARGV[i])
    local rest = {}
    for other in string.gmatch(channels or '', '%S+') do
      if other ~= sleeper then rest[#rest + 1] = other end
    end
    if #rest > 0 then
      call('HSET', K_WAITS, ARGV[i], table.concat(rest, ' '))
    elseif channels then
      call('HDEL', K_WAITS, ARGV[i])
    end
  end
  return 0
end

-- The unfinished jobs among those named; none when the wait is over already.
local function unfinished_jobs(is_first)
  local ids, open = {}, {}
  for i = 7, #ARGV do ids[i - 6] = ARGV[i] end
  read_ahead(ids)
  for _, id in ipairs(ids) do
    local j = load_job(id)
    if j and j.state < SUCCEEDED then open[#open + 1] = id end
  end
  return is_first and #open < #ids and {} or open
end

local function is_full(queue)
  local row = find_row(queue)
  return row and row.max_size > 0 and size_of(queue) >= row.max_size
end

-- List a sleeper that waits for the end of a job.
local function wait_for_job(id, sleeper)
  local channels = call('HGET', K_WAITS, id)
  if not channels then
    call('HSET', K_WAITS, id, sleeper)
  elseif not string.find(' ' .. channels .. ' ', ' ' .. sleeper .. ' ', 1, true) then
    call('HSET', K_WAITS, id, channels .. ' ' .. sleeper)
  end
end

function Verbs.waits()
  local verb, sleeper = ARGV[5], ARGV[6]
  if verb == 'leave' then return leave_waits(sleeper) end
  if come_due() then
    finish_step()
    return 'due'
  end
  flush()
  local open = {}
  if verb ~= 'space' then open = unfinished_jobs(verb == 'first') elseif is_full(ARGV[7]) then open = {ARGV[7]} end
  finish_step() -- write the jobs that came due before the sleeper is listed
  if #open == 0 then return -2 end
  if verb == 'space' then
    call('SADD', B .. ':space:' .. ARGV[7], sleeper)
  else
    for _, id in ipairs(open) do wait_for_job(id, sleeper) end
  end
  return next_due()
end
