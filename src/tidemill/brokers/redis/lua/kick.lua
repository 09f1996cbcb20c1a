-- Making a job ready that is not.

local function kick(j)
  if j.state == SCHEDULED then
    unplace(j)
    place(j, 0)
    return true
  end
  if j.state <= SUCCEEDED then return false end
  if flagged(j.flags, LINKED) then
    if links_of(j.id).waits == W_BARRIER then return false end -- it is never run
    add_end(j.id, REVIVED)
    local wait = wait_of(j.id)
    if wait and wait.dropped then
      wait.dropped = false
      flows.counted[j.id] = true
    end
  end
  if j.key ~= '' then
    if Keys.find(j.key) then return false end -- at most one unfinished job per key
    Keys.put(j.key, j.id, nil, 0, 0)
  end
  unfinish(j)
  j.limit = j.policy > 0 and j.attempt + j.policy or 0
  j.losses, j.expires, j.error = 0, 0, ''
  drop_result(j)
  if flagged(j.flags, CANCELLING) then j.flags = j.flags - CANCELLING end
  place(j, 0)
  return true
end
